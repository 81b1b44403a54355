"""What tests share: tiny models, judges, fakes and drivers."""
