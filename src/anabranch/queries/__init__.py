"""Building a query, checking it, and holding on to it while it runs."""
