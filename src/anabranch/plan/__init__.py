"""The plan of a query as a graph, independent of Spark."""
