"""Plans: a recipe and a setting (sizes, layout, dtype, device) compiled to a LinearPlan, once."""
