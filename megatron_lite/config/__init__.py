"""Settings of a run: schema, reading, validation and presets. Loads no torch."""
