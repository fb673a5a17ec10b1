"""The kernels of the linear layers around attention."""
