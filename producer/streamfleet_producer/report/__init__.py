"""A load as a page: records of what each request took, and the plots that are made of them."""
