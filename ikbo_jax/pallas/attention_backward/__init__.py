"""The kernel of broadcast attention's gradient."""
