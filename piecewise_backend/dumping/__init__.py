"""Everything that becomes of a model, written to a folder: `piecewise_backend.dump`."""
