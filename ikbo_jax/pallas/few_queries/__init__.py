"""Broadcast attention for users with few queries."""
