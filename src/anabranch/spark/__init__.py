"""Everything that touches Spark beyond the plain DataFrame API."""
