"""The kernels of generalised attention's gradient."""
