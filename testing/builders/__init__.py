"""Builders of small models, of plans for single operands and products, and of a stand-in for
Transformer Engine."""
