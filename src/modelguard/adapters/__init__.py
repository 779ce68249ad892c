"""One module per model library. Each is imported when a model of its library is loaded, or by the user."""
