"""The trace estimators, one algorithm a file."""
