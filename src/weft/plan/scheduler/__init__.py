"""The scheduler: builds candidate tile programs and chooses one by the clock."""
