"""The diagonal estimators, one algorithm a file."""
