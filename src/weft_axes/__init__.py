"""Whatever but attention happens along axes that ranks split."""
