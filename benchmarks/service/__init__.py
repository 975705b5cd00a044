"""A service that answers questions about retrieved documents, with BlendHub and without."""
