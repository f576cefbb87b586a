"""Every compiled loop of the package, one module per theme."""
