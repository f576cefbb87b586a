"""The plan of a query as a graph, and the checks it must pass before it runs."""
