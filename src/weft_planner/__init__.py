"""Planning: how long a layout takes on given hardware, before anything runs."""
