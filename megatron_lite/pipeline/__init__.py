"""Pipeline parallelism: in which order each rank computes its forwards and backwards, and how that order is run."""
