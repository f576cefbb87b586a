"""The plan of a query as a graph, which can be drawn and knows nothing of Spark."""
