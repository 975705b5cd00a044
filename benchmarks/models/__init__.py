"""What BlendHub costs and reuses of models of many architectures."""
