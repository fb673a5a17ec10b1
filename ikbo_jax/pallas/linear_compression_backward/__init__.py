"""The kernels of linear compression's gradient."""
