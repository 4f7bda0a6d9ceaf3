"""One op, one stem: the public function and, beside it, its plain definition."""
