"""Runs a plan: operands are made, sent between ranks and multiplied, forward and backward."""
