"""What a trained model is worth: the report, comparisons, importance, slices, usage of tables, scaling, pictures."""
