"""Splitting a model inside its layers: who has which part, and how parts are computed with."""
