"""Tables of predictions of a saved model."""
