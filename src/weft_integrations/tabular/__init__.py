"""TabPFN and TabICL on a layout: their rows split over ranks."""
