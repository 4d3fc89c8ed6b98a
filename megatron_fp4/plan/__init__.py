"""What a linear does, decided once: recipe, sizes, layout, dtype and device compiled to a plan."""
