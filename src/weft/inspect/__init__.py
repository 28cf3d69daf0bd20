"""Inspecting layouts: traffic, tables, timelines and pictures of plans and of runs."""
