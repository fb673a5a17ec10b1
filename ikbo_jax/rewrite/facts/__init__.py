"""Proves facts about values of a program."""
