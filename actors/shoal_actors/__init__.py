"""Thin Ray shells around the platform."""
