"""All that moves between ranks, a file per kind: rotate, trade, take, gather, hand on."""
