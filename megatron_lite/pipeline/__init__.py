"""Pipeline parallelism: schedules of forwards and backwards for each rank, and an engine that executes them."""
