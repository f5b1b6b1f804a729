"""Twins of attention kernels, for reading and measuring; each explains one idea in plain torch."""
