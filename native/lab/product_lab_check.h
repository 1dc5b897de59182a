#pragma once

// Compares our products with exact ones, for all types, numbers of rows and threads. Returns the number of wrong cases.
int check_products();
