"""What the kernels share: launch, shared memory, products, row stores, the tile schedule."""
