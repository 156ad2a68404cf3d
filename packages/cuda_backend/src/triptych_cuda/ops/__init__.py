"""One module an op: `forward`, `backward` and `reasons_against`, as Triptych's op specification defines them."""
