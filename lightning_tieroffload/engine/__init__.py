"""Floor 0. Package marker; import the modules."""
