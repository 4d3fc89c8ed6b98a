"""The three GEMMs of a linear and their operands, by the names that recipes and messages use."""

GEMMS = ("fprop", "dgrad", "wgrad")
# The two operands of each GEMM, by the letters that streams and messages use.
OPERANDS = {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("dy", "x")}
# The operands in text for users.
LETTERS = {"x": "X", "w": "W", "dy": "dY"}
