"""The kernel of linear compression."""
