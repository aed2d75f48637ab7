"""The judge of predictors: measured plans that differ, most of them never chosen, and how well they are priced."""
