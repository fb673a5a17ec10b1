"""The values that a rewritten program computes with, and the programs that compute them."""
