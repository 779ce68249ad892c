"""One module per model library. Each is imported when a model of its library turns up, or by you."""
