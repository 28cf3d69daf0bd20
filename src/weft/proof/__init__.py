"""Plans proven without tensors, and the transport that delivers messages late and in any order."""
