"""Plans proven without tensors, and a transport that delivers messages late and in any order."""
