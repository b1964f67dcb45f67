"""Fresh random inputs of every operator, with the float64 or float32 result to compare with."""
