"""Executes plans: makes operands, sends them between ranks, and runs the GEMMs."""
