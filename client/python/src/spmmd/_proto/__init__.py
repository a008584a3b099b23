"""Generated from proto/spmm/v1 when the package is built; not part of the public API."""
