"""Complete models built on this library's ops: `ranking`."""
