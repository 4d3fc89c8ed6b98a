"""How data-parallel ranks gather weights as the codes and scales that fprop multiplies."""
