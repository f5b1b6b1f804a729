"""Damaged and malicious files for every reader: structured mutations, each in a process with limits, and a judge."""
