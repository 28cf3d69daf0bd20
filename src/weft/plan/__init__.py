"""Plans: pure data, worked out per rank; no tensor and no process group is touched here."""
